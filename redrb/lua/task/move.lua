-- Move waiting entries to another status, in one consumer group.
-- KEYS[1] stream
-- ARGV    group, status, seq ...
-- Returns the number of entries that wait there now; those that are leased or gone are left alone.
-- -1: the consumer group is joining, the same again; -2: run `convert` until it is done
--@include task index room groups convert membership

begin_writing()
local group, status, moved = ARGV[1], ARGV[2], 0
if not exists() then
  return 0
end
if not is_nearly_indexed(groups()) then
  return -2
elseif not rules().indexed then
  index_all(groups())
end
if not join(group) then
  return -1
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
if moved > 0 then
  wake_pool(target, now_ms())
end
return moved
