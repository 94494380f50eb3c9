-- Begin an attempt to publish: its token is part of the names of its chunks, which are so never shared.
-- KEYS[1] versions
-- ARGV    owner, number of ranks, each of which gets a token, last token that the owner had
-- Returns {'ok', last token, newest version or 0, newest state or 0, whether the trash has keys}
--       | {'fenced'}: another publisher is the owner
--@include weights permissions

check_permissions(pins)
check_keys()
begin_writing()
if not is_owner(ARGV[1]) then
  return {'fenced'}
end
redis.call('HSET', fence, 'owner', ARGV[1])
local last, state = newest(), newest_state()
-- the server may have lost its last second, or the token is no number that counts on
local known = math.max(tonumber(ARGV[3]), token_of(last and last.token))
if token_of(redis.call('HGET', fence, 'token')) < known then
  redis.call('HSET', fence, 'token', string.format('%.0f', known))
end
discard_attempts()
return {'ok', redis.call('HINCRBY', fence, 'token', ARGV[2]), last and math.min(last.version, 2^53) or 0,
  state and state.version or 0, redis.call('EXISTS', trash)}
