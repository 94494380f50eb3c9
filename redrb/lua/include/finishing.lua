-- Ends leased entries for good: acknowledged or expired.
--@include task facts pending groups

-- End those of the entries that the slot leases. `outcome` is ack, of so many samples, or expire. `whole`: no
-- entry of this lease was ever requeued, so those that it does not lease are done. Returns the number of
-- entries ended.
local function end_held(group, slot, seqs, outcome, samples, whole)
  local state, acked, rule = key('group', group), outcome == 'ack', rules()
  local over = whole and rule.max_reads == 1 and seqs or held_by(group, slot, seqs)
  local again = #over
  if acked and rule.max_reads ~= 1 then
    --@include rereads
    over = read_again(group, over)
  end
  again = again - #over
  local ended = acknowledge(group, over)
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    local members = {}
    for i, seq in ipairs(over) do
      members[i] = member_of(seq)
    end
    in_parts('HDEL', key('deliveries', group), members)
  end
  add(state, acked and 'acked' or 'expired', ended)
  if ended + again > 0 and acked then
    add(state, 'samples_acked', samples)
  end
  if acked then
    --@include consumption
    note_consumed(over)
  end
  forget(group, over, acked)
  return ended + again
end
