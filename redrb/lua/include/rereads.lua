-- Acknowledges entries of tasks that read them several times or keep them as history.
--@include task facts pending leases

-- Requeue leased entries that may be read again, and let go of those that another client deleted. Returns
-- the other entries.
local function read_again(group, seqs)
  local rule, now, over, again, members = rules(), server_ms(), {}, {}, {}
  for _, seq in ipairs(seqs) do
    local member = member_of(seq)
    local facts, reads = facts_of(member), 0
    if facts then
      count_read(member, facts, now)
      reads = redis.call('HINCRBY', key('reads', group), member, 1)
    end
    if not facts then
      again[#again + 1] = seq
    elseif rule.max_reads == 0 or reads < rule.max_reads then
      again[#again + 1], members[#members + 1] = seq, member
    else
      over[#over + 1] = seq
    end
  end
  acknowledge(group, again)
  in_parts('HDEL', key('deliveries', group), members)
  requeue(group, again)
  add(key('group', group), 'reads', #members)
  return over
end
