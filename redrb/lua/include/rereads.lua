-- Acknowledges entries of tasks that read them several times or keep them as history.
--@include task facts groups leases

-- Requeue entries that may be read again. Returns the other entries; if entries are read several times
-- or kept as history, without those that an earlier, repeated call has ended.
local function read_again(group, slot, seqs)
  local rule, over = rules(), {}
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
