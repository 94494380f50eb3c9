-- Ends leased entries for good: acknowledged or expired.
--@include task facts pending groups

-- End those of the entries that the slot leases. `outcome` is ack, of so many samples, or expire. Returns
-- the number of entries ended.
local function end_held(group, slot, seqs, outcome, samples)
  local state, acked, over = key('group', group), outcome == 'ack', held_by(group, slot, seqs)
  local ended = #over
  if acked and (rules().max_reads ~= 1 or rules().keeps) then
    --@include rereads
    over = read_again(group, over)
  elseif not acked and (rules().max_reads > 1 or rules().keeps) then
    left_unread(group, over, true)
  end
  acknowledge(group, over)
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    local members = {}
    for i, seq in ipairs(over) do
      members[i] = member_of(seq)
    end
    in_parts('HDEL', key('deliveries', group), members)
  end
  add(state, acked and 'acked' or 'expired', #over)
  if ended > 0 and acked then
    add(state, 'samples_acked', samples)
  end
  forget(group, over, acked)
  return ended
end
