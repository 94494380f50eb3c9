-- Register a consumer group: from now on no entry is deleted before the group is done with it.
-- KEYS[1] stream
-- ARGV    the call `Join` of redrb/stream/task/calls.py
-- Returns its reply
--@include task membership permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if not exists() then
  return cmsgpack.pack({joined = false})
end
local joined = join(ask.group, ask.newest)
return cmsgpack.pack({joined = joined, more = not joined})
