-- Ends leased entries for good: acknowledged, expired or rejected.
--@include task facts history groups leases

-- Whether a slot leases an entry. In a repeated call, the entry may be another slot's by now.
local function holds(group, slot, seq)
  return #redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1, slot) > 0
end

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

-- Requeue entries that may be read again. Returns the other entries; if entries are read several times
-- or kept as history, without those that an earlier, repeated call has ended.
local function read_again(group, slot, seqs)
  local rule, over = rules(), {}
  if rule.max_reads == 1 and not keeps() then
    return seqs
  end
  for _, seq in ipairs(seqs) do
    local member = member_of(seq)
    local facts = holds(group, slot, seq) and facts_of(member)
    if facts then
      count_read(member, facts)
      local reads = redis.call('HINCRBY', key('reads', group), member, 1)
      if rule.max_reads == 0 or reads < rule.max_reads then
        redis.call('XACK', stream, group, id_of(seq))
        redis.call('HDEL', key('deliveries', group), member)
        requeue(group, seq)
        add(key('group', group), 'reads', 1)
      else
        over[#over + 1] = seq
      end
    end
  end
  return over
end

-- `outcome` is ack, of so many samples, or expire. Returns the number of entries ended.
local function end_held(group, slot, seqs, outcome, samples)
  local state, all, ended, acked = key('group', group), #seqs, 0, outcome == 'ack'
  if acked then
    seqs = read_again(group, slot, seqs)
  elseif rules().max_reads > 1 or keeps() then
    seqs = held_yet(group, slot, seqs)
    left_unread(group, seqs, true)
    all = #seqs
  end
  local again = all - #seqs
  for first = 1, #seqs, 1000 do
    local ids = {}
    for i = first, math.min(first + 999, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
    end
    ended = ended + redis.call('XACK', stream, group, unpack(ids))
  end
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    for _, seq in ipairs(seqs) do
      redis.call('HDEL', key('deliveries', group), member_of(seq))
    end
  end
  add(state, acked and 'acked' or 'expired', ended)
  if ended + again > 0 and acked then
    add(state, 'samples_acked', samples)
  end
  forget(group, seqs, acked)
  return ended + again
end

-- Move entries to the dead-letter stream. Returns their number.
local function reject_held(group, slot, seqs, reason, consumer)
  local rejected = {}
  for _, seq in ipairs(seqs) do
    local fields = fields_of(seq)
    if holds(group, slot, seq) and redis.call('XACK', stream, group, id_of(seq)) == 1 then
      left_unread(group, {seq}, true)
      add_dead_letter(group, seq, fields, reason, consumer)
      rejected[#rejected + 1] = seq
    end
  end
  forget(group, rejected)
  return #rejected
end
