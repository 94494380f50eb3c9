-- A consumer ends: its leased groups are requeued, a page at a time. If it has died, this counts as a failed
-- delivery of each, as if its deadline were over.
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
local died = ask.died and {consumer = consumer}
local returned, ended = return_leases(group, consumer, died, PAGE.taken_over)
add(key('group', group), 'taken_over', died and returned or 0)
if returned > 0 then
  wake_room()
  wake_entered()
end
return cmsgpack.pack({more = not ended, found = returned})
