-- Go on to delete versions that are no longer kept.
-- KEYS[1] versions
-- ARGV    the call `Trim` of redrb/weights/wire/calls.py
-- Returns the page
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', fence, 'owner') ~= ask.owner or not newest() then
  return cmsgpack.pack({more = false})
end
return cmsgpack.pack(trim(ask.keep, ask.max_bytes, ask.after))
