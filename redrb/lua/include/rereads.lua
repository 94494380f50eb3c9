-- Acknowledges entries of tasks that read them several times.
--@include task facts pending leases

-- Requeue leased entries that may be read again, and let go of those that another client deleted. Returns
-- the other entries.
local function read_again(group, seqs)
  local most, members, over, again, read = rules().max_reads, {}, {}, {}, {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  for i, stored in ipairs(replies_of('HMGET', key('facts'), members)) do
    local reads = stored and redis.call('HINCRBY', key('reads', group), members[i], 1)
    if not reads then
      again[#again + 1] = seqs[i]
    elseif most == 0 or reads < most then
      again[#again + 1], read[#read + 1] = seqs[i], members[i]
    else
      over[#over + 1] = seqs[i]
    end
  end
  acknowledge(group, again)
  in_parts('HDEL', key('deliveries', group), read)
  requeue(group, again)
  add(key('group', group), 'reads', #read)
  return over
end
