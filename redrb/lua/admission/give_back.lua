-- A maker returns rights that it does not use, and gives up requests; or it has died, as its machine knows.
-- KEYS[1] stream
-- ARGV    the call `GiveBack` of redrb/stream/admission/calls.py
-- Returns the page: rights returned. Repeated, it returns none a second time.
--@include task facts waiters permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local holder, ended = ask.holder, {}
if ask.died then
  for _, waiter in ipairs(redis.call('ZRANGE', key('queue', '#admission'), 0, PAGE.waiters - 1)) do
    if string.match(waiter, '^[^/]+') == holder then
      dequeue('#admission', waiter)
    end
  end
end
if not rules().groups_per_version then
  dequeue('#admission', holder)
  return cmsgpack.pack({found = 0})
end
--@include admission held_rights
if redis.call('HGET', key('admission'), 'series') == ask.series then
  for i, record in ipairs(replies_of('HMGET', key('right'), ask.numbers)) do
    if record and not string.find(record, ' #%S+$') then -- else a group keeps it
      ended[#ended + 1] = ask.numbers[i]
    end
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
local returned = end_rights(ended, ask.died and 'lost' or 'returned')
wake_rights()
return cmsgpack.pack({more = holder ~= '' and #ended == PAGE.rights_returned, found = returned})
