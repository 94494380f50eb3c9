-- How entries that a slot holds end for good: acknowledged, expired or rejected.
--@include task index history groups leases

-- An entry that a lease gave back before, by a call that is repeated, may be another's by now.
local function holds(group, slot, seq)
  return #redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1, slot) > 0
end

local function held_yet(group, slot, seqs)
  local found = {}
  for _, seq in ipairs(seqs) do
    if holds(group, slot, seq) then
      found[#found + 1] = seq
    end
  end
  return found
end

-- What may be read again waits again; returns the others, less those that an earlier call has ended
-- where it matters: they may wait again by now, or be history.
local function read_again(group, slot, seqs)
  local told, over = rules(), {}
  if not told.indexed or told.max_reads == 1 and not keeps() then
    return seqs
  end
  for _, seq in ipairs(seqs) do
    local member = member_of(seq)
    local facts = holds(group, slot, seq) and facts_of(member)
    if facts then
      count_read(member, facts)
      local reads = redis.call('HINCRBY', key('reads', group), member, 1)
      if told.max_reads == 0 or reads < told.max_reads then
        redis.call('XACK', stream, group, id_of(seq))
        redis.call('HDEL', key('deliveries', group), member)
        wait_again(group, seq)
        add(key('group', group), 'reads', 1)
      else
        over[#over + 1] = seq
      end
    end
  end
  return over
end

-- `outcome`: ack, of so many samples, or expire. Returns the number of entries.
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

-- To the dead-letter stream. Returns the number of entries.
local function reject_held(group, slot, seqs, reason, consumer)
  local buried = {}
  for _, seq in ipairs(seqs) do
    local fields = fields_of(seq)
    if holds(group, slot, seq) and redis.call('XACK', stream, group, id_of(seq)) == 1 then
      left_unread(group, {seq}, true)
      bury(group, seq, fields, reason, consumer)
      buried[#buried + 1] = seq
    end
  end
  forget(group, buried)
  return #buried
end
