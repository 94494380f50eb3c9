-- A consumer ends: its leased groups are requeued, some hundred at a time.
-- KEYS[1] stream
-- ARGV    group, consumer
-- Returns {'more' | 'done', entries requeued}: with 'more', run it again
--@include task waking leases permissions

local group, consumer = ARGV[1], ARGV[2]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return {'done', 0}
end
local slots = slots_of(group, consumer)
if #slots == 0 and not redis.call('ZSCORE', key('consumers', group), consumer) then
  return {'done', 0}
end
check_permissions(stream)
begin_writing()
local returned = return_leases(group, consumer, slots, false, PAGE.taken_over)
wake_returned(group)
local left = redis.call('ZSCORE', key('consumers', group), consumer)
return {left and 'more' or 'done', returned}
