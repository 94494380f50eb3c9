-- Acknowledge the entries that a checkpoint has trained, waiting or leased, by their seq.
-- KEYS[1] stream
-- ARGV    group, seq, samples, seq, samples, ...
-- Returns the number of entries acknowledged; repeated, 0. If entries are read several times it does
--         nothing, as they would be read again anyway.
--@include task facts pools history capacity waiters groups

begin_writing()
local group, over, samples = ARGV[1], {}, 0
local state, indexed = key('group', group), rules().indexed
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0
  or (indexed and rules().max_reads ~= 1) then
  return 0
end
for i = 2, #ARGV, 2 do
  local seq = ARGV[i]
  local pool = waits_in(group, seq)
  local found = true
  if pool and indexed then
    withdraw(group, pool, {member_of(seq)})
    add(state, 'waiting', -1)
    add(state, 'taken', 1)
  elseif pool and redis.call('ZREM', key('ready', group), member_of(seq)) == 1 then
    add(state, 'waiting', -1)
  else -- leased by a consumer that is dead, or that will learn that it lost the lease
    found = redis.call('XACK', stream, group, id_of(seq)) == 1
  end
  if found then
    local facts = indexed and keeps() and facts_of(member_of(seq))
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
wake('#room', room_left(), now_ms())
return #over
