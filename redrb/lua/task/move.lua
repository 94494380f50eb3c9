-- Move waiting groups to another status, in one consumer group. Leased groups are left alone.
-- KEYS[1] stream
-- ARGV    the call `Move` of redrb/stream/task/calls.py
-- Returns the page: how many of the entries wait in that status now; more while the consumer group joins
--@include task facts pools waking groups membership permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, status, moved = ask.group, ask.status, 0
if not exists() then
  return cmsgpack.pack({found = 0})
end
if not join(group) then
  return cmsgpack.pack({more = true})
end
local target = pool_of(group, status)
for _, seq in ipairs(ask.seqs) do
  local member = member_of(seq)
  local pool = waits_in(group, seq)
  if pool then
    if pool ~= target then
      local facts = facts_of(member)
      withdraw(group, pool, {member})
      redis.call('HSET', key('moved', group), member, status)
      redis.call('HDEL', key('expiries', group), member)
      enter(group, target, {member}, {facts})
    end
    moved = moved + 1
  end
end
wake_entered()
return cmsgpack.pack({found = moved})
