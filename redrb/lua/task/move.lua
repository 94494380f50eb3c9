-- Move waiting groups to another status, in one consumer group. Leased groups are left alone.
-- KEYS[1] stream
-- ARGV    group, status, seq ...
-- Returns {'ok', entries}: how many of the entries wait in that status now
--         | {'more'}: the consumer group is joining, run it again
--@include task facts pools waking groups membership permissions

check_permissions(KEYS[1])
begin_writing()
local group, status, moved = ARGV[1], ARGV[2], 0
if not exists() then
  return {'ok', 0}
end
if not join(group) then
  return {'more'}
end
local target = pool_of(group, status)
for i = 3, #ARGV do
  local member = member_of(ARGV[i])
  local pool = waits_in(group, ARGV[i])
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
return {'ok', moved}
