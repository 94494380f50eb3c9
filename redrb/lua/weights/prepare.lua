-- Note the keys of an attempt. Then the caller makes them permanent. If it dies before the commit, the next
-- attempt deletes them.
-- KEYS[1] versions
-- ARGV    owner, token, ranges of its keys
-- Returns 'ok' | 'fenced': another publisher is the owner | 'gone': a newer attempt has begun
--@include weights permissions

check_permissions(pins)
check_keys()
begin_writing()
if not is_owner(ARGV[1]) then
  return 'fenced'
end
if redis.call('HGET', fence, 'owner') ~= ARGV[1] or redis.call('HGET', fence, 'token') ~= ARGV[2] then
  return 'gone'
end
redis.call('HSET', attempts, ARGV[2], 'keys ' .. ARGV[3])
return 'ok'
