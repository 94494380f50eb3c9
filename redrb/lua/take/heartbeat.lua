-- Renew a consumer's deadline, requeue the leases of consumers whose deadline is over, take back the rights
-- of makers whose deadline is over, and remove old records of producers.
-- KEYS[1] stream
-- ARGV    the call `Beat` of redrb/stream/take/calls.py; the announcement of the consumer's worker, which has
--         its name: include/announcements.lua; '': none
-- Returns its reply
--@include task clock facts waking takeover producers announcements late_heartbeats permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, consumer, lease_ms = ask.group, ask.consumer, ask.lease_ms
if rules().exists and rules().incarnation ~= ask.incarnation then
  return cmsgpack.pack({outcome = 'anew'})
elseif not rules().exists or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return cmsgpack.pack({outcome = 'lost'})
end
remove_records(server_ms())
announce(consumer, ARGV[2], false)
local now = set_clock(lease_ms)
local returned, known, more = beat(group, consumer, lease_ms, now)
local lost, further, makers = 0, false, {}
if rules().groups_per_version then
  --@include held_rights late_makers
  lost, further = reclaim_rights(now)
  makers = late_makers(now, lease_ms)
end
if returned + lost > 0 then
  wake_room(now)
  wake_entered(now)
end
local due = redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', string.format('%.0f', now), 'LIMIT', 0, 1)
return cmsgpack.pack({outcome = known and 'held' or 'lost', taken_over = returned, due = #due > 0,
  more = more or further, consumers = late_for('consumers:' .. group, now, lease_ms), makers = makers})
