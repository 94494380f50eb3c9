-- Acknowledge the entries that a checkpoint has trained, waiting or leased, by their seq.
-- KEYS[1] stream
-- ARGV    group, seq, samples, seq, samples, ...
-- Returns the number of entries acknowledged; repeated, 0. If entries are read several times it does
--         nothing, as they would be read again anyway.
--@include task facts pools waking groups

begin_writing()
local group, over, samples = ARGV[1], {}, 0
local state = key('group', group)
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0
  or rules().max_reads ~= 1 then
  return 0
end
for i = 2, #ARGV, 2 do
  local seq = ARGV[i]
  local pool = waits_in(group, seq)
  local found = true
  if pool then
    withdraw(group, pool, {member_of(seq)})
    add(state, 'taken', 1)
  else -- leased by a consumer that is dead, or that will learn that it lost the lease
    found = redis.call('XACK', stream, group, id_of(seq)) == 1
  end
  if found then
    local facts = rules().keeps and facts_of(member_of(seq))
    if facts then -- acknowledged entries are kept as history
      count_read(member_of(seq), facts)
    end
    over[#over + 1] = seq
    samples = samples + tonumber(ARGV[i + 1])
    redis.call('HDEL', key('deliveries', group), member_of(seq))
  end
end
add(state, 'acked', #over)
add(state, 'samples_acked', samples)
forget(group, over, true)
wake_room()
return #over
