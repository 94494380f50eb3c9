-- Refuse an attempt that failed, unless its version was committed after all.
-- KEYS[1] versions
-- ARGV    the call `Discard` of redrb/weights/wire/calls.py
-- Returns its reply
--@include weights permissions

local ask = cmsgpack.unpack(ARGV[1])
local committed = at(ask.version)
if committed and committed.token == ask.token then
  return cmsgpack.pack({committed = true})
end
check_permissions(pins)
check_keys()
begin_writing()
local noted = redis.call('HGET', attempts, ask.token)
if noted then
  discard_attempt(noted)
  redis.call('HDEL', attempts, ask.token)
end
return cmsgpack.pack({committed = false, trash = redis.call('EXISTS', trash) == 1})
