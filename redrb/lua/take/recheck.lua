-- Look at a batch once more when it is handed over, some time after its take: if one of its groups has
-- become too stale, the whole batch is requeued, a page at a time, and the groups that are too stale expire.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, status, seq ...
--         status: the one in which the groups were taken
-- Returns {'fresh'} | {'more'}: the lease has ended, run it again to requeue the rest
--       | {'lost'}: it has ended
--         Repeated, it changes nothing more.
--@include task facts

begin_writing()
local group, slot, token, status = ARGV[1], ARGV[3], ARGV[4], ARGV[5]
local held = redis.call('HGET', key('leases', group), slot)
if string.match(held or '', '^%d+') ~= token or held == token .. ' ended' then
  return {'lost'}
end
local members, stale = {}, held == token .. ' lost'
for i = 6, #ARGV do
  members[i - 5] = member_of(ARGV[i])
end
for _, facts in ipairs(stale and {} or facts_of_all(members)) do
  stale = stale or facts and is_overdue(facts)
end
if not stale then
  return {'fresh'}
end

--@include leases staleness waking
local _, emptied = return_slot(group, slot, false, PAGE.taken_over)
local _, more = expire_overdue(group, status)
wake_room()
wake_returned(group)
return {(more or not emptied) and 'more' or 'lost'}
