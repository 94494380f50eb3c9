-- Expire the waiting entries that are named by their seq. Leased entries are left alone.
-- KEYS[1] stream
-- ARGV    group, seq ...
-- Returns the number of entries that waited.
--@include task pools waking groups permissions

check_permissions(KEYS[1])
begin_writing()
local group, found = ARGV[1], {}
if not exists() then
  return 0
end
for i = 2, #ARGV do
  local pool = waits_in(group, ARGV[i])
  if pool then
    withdraw(group, pool, {member_of(ARGV[i])})
    redis.call('HDEL', key('deliveries', group), member_of(ARGV[i]))
    found[#found + 1] = ARGV[i]
  end
end
add(key('group', group), 'expired', #found)
left_unread(group, found)
forget(group, found)
wake_room()
return #found
