-- Note the keys of an attempt. Then the caller makes them permanent. If it dies before the commit, the next
-- attempt deletes them.
-- KEYS[1] versions
-- ARGV    the call `Prepare` of redrb/weights/wire/calls.py
-- Returns its reply
--@include weights permissions

check_permissions(pins)
check_keys()
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if not is_owner(ask.owner) then
  return cmsgpack.pack('fenced')
end
if redis.call('HGET', fence, 'owner') ~= ask.owner or redis.call('HGET', fence, 'token') ~= ask.token then
  return cmsgpack.pack('gone')
end
redis.call('HSET', attempts, ask.token, 'keys ' .. ask.uploaded)
return cmsgpack.pack('ok')
