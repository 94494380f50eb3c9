-- Begin an attempt to publish: its token is part of the names of its chunks, which are so never shared.
-- KEYS[1] versions
-- ARGV    the call `Begin` of redrb/weights/wire/calls.py
-- Returns its reply
--@include weights permissions

check_permissions(pins)
check_keys()
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if not is_owner(ask.owner) then
  return cmsgpack.pack({outcome = 'fenced'})
end
redis.call('HSET', fence, 'owner', ask.owner)
local last, state = newest(), newest_state()
-- the server may have lost its last second, or the token is no number that counts on
local known = math.max(ask.token, token_of(last and last.token))
if token_of(redis.call('HGET', fence, 'token')) < known then
  redis.call('HSET', fence, 'token', string.format('%.0f', known))
end
discard_attempts()
return cmsgpack.pack({outcome = 'ok', token = redis.call('HINCRBY', fence, 'token', 1),
  newest = last and math.min(last.version, 2^53) or 0, newest_state = state and state.version or 0,
  trash = redis.call('EXISTS', trash) == 1, asked = asked_kind() == 'full'})
