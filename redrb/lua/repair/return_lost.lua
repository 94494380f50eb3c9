-- Requeue groups, some at a time, of a consumer that the task does not know. One that is known again, by its
-- heartbeat, keeps its leases.
-- KEYS[1] stream
-- ARGV    group, consumer
-- Returns {'more' | 'done', entries requeued}; with 'more', run it again
--@include task waking leases permissions

local group, consumer = ARGV[1], ARGV[2]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0
  or redis.call('ZSCORE', key('consumers', group), consumer) then
  return {'done', 0}
end
local slots, seen = {}, {}
for _, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', PAGE.repaired_leases)) do
  local slot = entry[2]
  if not seen[slot] and (string.match(slot, '^(.*)/%d+$') or slot) == consumer then
    seen[slot], slots[#slots + 1] = true, slot
  end
end
if #slots == 0 then
  return {'done', 0}
end
check_permissions(stream)
begin_writing()
local returned = 0
for _, slot in ipairs(slots) do
  if returned < PAGE.taken_over then
    local found, emptied = return_slot(group, slot, false, PAGE.taken_over - returned)
    returned = returned + found
    if emptied then
      remove_slot(group, slot)
    end
  end
end
wake_returned(group)
return {'more', returned}
