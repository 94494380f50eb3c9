-- Acknowledge the entries that a checkpoint has trained, waiting or leased, by their seq.
-- KEYS[1] stream
-- ARGV    group, incarnation, seq, samples, seq, samples, ...
--         incarnation: of the task in which these entries were leased
-- Returns {entries acknowledged, entries refused}: refused are those that may be others than the ones that
--         were trained, because the task was created anew since, or was restored from an older save.
--         Repeated, none is acknowledged. If entries are read several times it does nothing, as they
--         would be read again anyway.
--@include task facts pools waking groups ended_elsewhere permissions

check_permissions(KEYS[1])
begin_writing()
local group, over, samples, refused = ARGV[1], {}, 0, 0
local state = key('group', group)

-- The last seq that names the same entry in this task as in that incarnation.
local function last_shared(incarnation)
  if rules().incarnation == incarnation then
    return math.huge
  end
  local ancestors = redis.call('HGET', task, 'ancestors') or ''
  for name, last in string.gmatch(ancestors, '(%S+) (%d+)') do
    if name == incarnation then
      return tonumber(last)
    end
  end
  return 0
end

local last = last_shared(ARGV[2])
local joined = redis.call('SISMEMBER', key('groups'), group) == 1 and rules().max_reads == 1
for i = 3, #ARGV, 2 do
  local seq = ARGV[i]
  local known = tonumber(seq) <= last
  local pool = joined and known and waits_in(group, seq)
  local found = joined and known
  refused = refused + (known and 0 or 1)
  if pool then
    withdraw(group, pool, {member_of(seq)})
    add(state, 'taken', 1)
  elseif found then -- leased by a consumer that is dead, or that learns now that it lost the lease
    local pending = redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1)
    lose_all(group, pending)
    found = #pending > 0 and redis.call('XACK', stream, group, id_of(seq)) == 1
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
if #over > 0 then
  add(state, 'acked', #over)
  add(state, 'samples_acked', samples)
  forget(group, over, true)
  wake_room()
end
return {#over, refused}
