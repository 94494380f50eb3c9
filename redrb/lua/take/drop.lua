-- Give up a take whose reply was lost: the entries that it has leased are requeued, some at a time. A take
-- that arrives after that leases nothing.
-- KEYS[1] stream
-- ARGV    the call `Drop` of redrb/stream/take/calls.py
-- Returns the page: entries requeued
--@include task waking leases permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, slot, token = ask.group, ask.slot, ask.token
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return cmsgpack.pack({found = 0})
end
local held = redis.call('HGET', key('leases', group), slot)
local newest = tonumber(string.match(held or '', '^%d+') or 0)
if newest > tonumber(token) or newest == tonumber(token) and string.find(held, ' ended', 1, true) then
  return cmsgpack.pack({found = 0})
end
local returned, emptied = return_slot(group, slot, false, PAGE.taken_over, token)
if returned > 0 then
  wake_room()
  wake_entered()
end
return cmsgpack.pack({more = not emptied, found = returned})
