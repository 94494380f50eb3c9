-- A maker returns rights that it does not use, and gives up requests.
-- KEYS[1] stream
-- ARGV    series, holder, number ...
--         series: of the rights; numbers of another series are not those of this maker
--         holder: a waiter "<maker>/<request>", which leaves the queue, or a maker that ends: all rights of
--         it are returned; '': none but those that are named by their numbers
-- Returns {'more' | 'done', rights returned}: with 'more', run it again
--         Repeated, it returns none a second time.
--@include task facts waiters permissions

check_permissions(KEYS[1])
begin_writing()
if not rules().groups_per_version then
  dequeue('#admission', ARGV[2])
  return {'done', 0}
end
--@include admission held_rights
local holder, ended = ARGV[2], {}
if redis.call('HGET', key('admission'), 'series') == ARGV[1] then
  for i = 3, #ARGV do
    ended[i - 2] = ARGV[i]
  end
end
if holder ~= '' then
  ended = rights_of(holder, PAGE.rights_returned)
  if string.find(holder, '/', 1, true) then
    dequeue('#admission', holder)
  elseif #ended < PAGE.rights_returned then
    redis.call('ZREM', key('makers'), holder)
  end
end
local returned = end_rights(ended, 'returned')
wake_rights()
return {holder ~= '' and #ended == PAGE.rights_returned and 'more' or 'done', returned}
