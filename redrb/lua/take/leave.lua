-- A consumer ends: its leased groups are requeued, a page at a time.
-- KEYS[1] stream
-- ARGV    the call `Leave` of redrb/stream/take/calls.py
-- Returns the page: entries requeued
--@include task waking takeover permissions

local ask = cmsgpack.unpack(ARGV[1])
local group, consumer = ask.group, ask.consumer
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return cmsgpack.pack({found = 0})
end
check_permissions(stream)
begin_writing()
local returned, ended = return_leases(group, consumer, false, PAGE.taken_over)
if returned > 0 then
  wake_room()
  wake_returned(group)
end
return cmsgpack.pack({more = not ended, found = returned})
