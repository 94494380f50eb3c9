-- Ends leased entries for good: acknowledged or expired.
--@include task facts groups

-- Those of the seqs that the slot leases.
local function held_yet(group, slot, seqs)
  local found = {}
  for _, seq in ipairs(seqs) do
    if holds(group, slot, seq) then
      found[#found + 1] = seq
    end
  end
  return found
end

-- `outcome` is ack, of so many samples, or expire. Returns the number of entries ended.
local function end_held(group, slot, seqs, outcome, samples)
  local state, all, ended, acked = key('group', group), #seqs, 0, outcome == 'ack'
  if acked and (rules().max_reads ~= 1 or rules().keeps) then
    --@include rereads
    seqs = read_again(group, slot, seqs)
  elseif not acked and (rules().max_reads > 1 or rules().keeps) then
    seqs = held_yet(group, slot, seqs)
    left_unread(group, seqs, true)
    all = #seqs
  end
  local again = all - #seqs
  for first = 1, #seqs, PAGE.arguments do
    local ids = {}
    for i = first, math.min(first + PAGE.arguments - 1, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
    end
    ended = ended + redis.call('XACK', stream, group, unpack(ids))
  end
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    local members = {}
    for i, seq in ipairs(seqs) do
      members[i] = member_of(seq)
    end
    in_parts('HDEL', key('deliveries', group), members)
  end
  add(state, acked and 'acked' or 'expired', ended)
  if ended + again > 0 and acked then
    add(state, 'samples_acked', samples)
  end
  forget(group, seqs, acked)
  return ended + again
end
