-- Acknowledge the entries that a checkpoint has trained, waiting or leased, by their seq.
-- KEYS[1] stream
-- ARGV    the call `Settle` of redrb/stream/task/calls.py
-- Returns its reply: all are refused if the task was created anew since, as ids are of other entries then.
--         Repeated, none is acknowledged.
--@include task facts pools waking groups ended_elsewhere consumption permissions

check_permissions(KEYS[1])
begin_writing()
local ask, over, samples = cmsgpack.unpack(ARGV[1]), {}, 0
local group = ask.group
local state = key('group', group)

if rules().incarnation ~= ask.incarnation then
  return cmsgpack.pack({acknowledged = 0, refused = #ask.trained})
end
local joined = redis.call('SISMEMBER', key('groups'), group) == 1 and rules().max_reads == 1
for _, trained in ipairs(ask.trained) do
  local seq = trained[1]
  local pool, found = joined and waits_in(group, seq), joined
  if pool then
    withdraw(group, pool, {member_of(seq)})
  elseif found then -- leased by a consumer that is dead, or that learns now that it lost the lease
    local pending = redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1)
    lose_all(group, pending)
    found = #pending > 0 and redis.call('XACK', stream, group, id_of(seq)) == 1
  end
  if found then
    over[#over + 1] = seq
    samples = samples + trained[2]
    redis.call('HDEL', key('deliveries', group), member_of(seq))
  end
end
if #over > 0 then
  add(state, 'acked', #over)
  add(state, 'samples_acked', samples)
  note_consumed(over)
  forget(group, over, true)
  wake_room()
end
return cmsgpack.pack({acknowledged = #over, refused = 0})
