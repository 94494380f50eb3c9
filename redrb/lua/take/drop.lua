-- Give up a take whose reply was lost: the entries that it has leased are requeued, some at a time. A take
-- that arrives after that leases nothing.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token
--         token: of the take; an older lease in its slot ends too, as the consumer has given it up before
-- Returns {'more' | 'done', entries requeued}: with 'more', run it again
--@include task waking leases permissions

check_permissions(KEYS[1])
begin_writing()
local group, slot, token = ARGV[1], ARGV[3], ARGV[4]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return {'done', 0}
end
local held = redis.call('HGET', key('leases', group), slot)
if held == token .. ' ended' or (held and tonumber(string.match(held, '^%d+')) > tonumber(token)) then
  return {'done', 0}
end
local returned, emptied = return_slot(group, slot, false, PAGE.taken_over, token)
if returned > 0 then
  wake_room()
  wake_returned(group)
end
return {emptied and 'done' or 'more', returned}
