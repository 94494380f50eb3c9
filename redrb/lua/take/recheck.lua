-- Look at a batch once more when it is handed over, some time after its take: if one of its groups has
-- become too stale, the whole batch is requeued, and the groups that are too stale expire.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, status, seq ...
--         status: the one in which the groups were taken
-- Returns {'fresh'} | {'stale'}: the lease has ended | {'lost'}: another consumer has the lease
--         Repeated, it changes nothing more and returns the same.
--@include task facts

begin_writing()
local group, slot, token, status = ARGV[1], ARGV[3], ARGV[4], ARGV[5]
local held = redis.call('HGET', key('leases', group), slot)
if held == token .. ' ended' then
  return {'stale'}
elseif held ~= token then
  return {'lost'}
end
local members, stale = {}, false
for i = 6, #ARGV do
  members[i - 5] = member_of(ARGV[i])
end
for _, facts in ipairs(facts_of_all(members)) do
  stale = stale or facts and is_overdue(facts)
end
if not stale then
  return {'fresh'}
end

--@include leases staleness waking groups
for i = 6, #ARGV do
  if holds(group, slot, ARGV[i]) then
    return_lease(group, ARGV[i], false)
  end
end
redis.call('HSET', key('leases', group), slot, token .. ' ended')
expire_overdue(group, status)
wake_room()
wake_returned(group)
return {'stale'}
