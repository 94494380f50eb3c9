-- Requeue groups, a page at a time, that a slot of a consumer leases which the task does not know. A consumer
-- that is known again, by its heartbeat, keeps its leases.
-- KEYS[1] stream
-- ARGV    group, consumer, slot
-- Returns {'more' | 'done', entries requeued}; with 'more', run it again
--@include task waking leases permissions

local group, consumer, slot = ARGV[1], ARGV[2], ARGV[3]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0
  or redis.call('ZSCORE', key('consumers', group), consumer) then
  return {'done', 0}
end
check_permissions(stream)
begin_writing()
local returned, emptied = return_slot(group, slot, false, PAGE.taken_over)
if emptied then
  remove_slot(group, slot)
end
wake_returned(group)
return {emptied and 'done' or 'more', returned}
