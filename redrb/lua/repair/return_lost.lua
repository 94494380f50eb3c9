-- Requeue groups, a page at a time, that a slot of a consumer leases which the task does not know. A consumer
-- that is known again, by its heartbeat, keeps its leases.
-- KEYS[1] stream
-- ARGV    the call `ReturnLost` of redrb/watch/doctor/calls.py
-- Returns the page: entries requeued
--@include task waking leases permissions

local ask = cmsgpack.unpack(ARGV[1])
local group, slot = ask.group, ask.slot
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0
  or redis.call('ZSCORE', key('consumers', group), ask.consumer) then
  return cmsgpack.pack({found = 0})
end
check_permissions(stream)
begin_writing()
local returned, emptied = return_slot(group, slot, false, PAGE.taken_over)
if emptied then
  remove_slot(group, slot)
end
wake_entered()
return cmsgpack.pack({more = not emptied, found = returned})
