-- Renew a consumer's deadline, requeue the leases of consumers whose deadline is over, take back the rights
-- of makers whose deadline is over, and remove old records of producers.
-- KEYS[1] stream
-- ARGV    group, consumer, lease_ms, incarnation, announcement
--         lease_ms: the consumer is dead after so long without a heartbeat
--         announcement: of the consumer's worker, which has its name: include/announcements.lua; '': none
-- Returns {'held' | 'lost', entries, due, more}: whether the consumer was registered until now, so that it
--         has its leases yet; how many entries were taken over from other consumers; 1 if parts/due has
--         work; 1 if there is more to take over: beat again at once
--       | {'anew', 0, 0, 0}: the task was created anew since the client has opened it in this incarnation
--@include task clock facts waking takeover producers announcements permissions

check_permissions(KEYS[1])
begin_writing()
local group, consumer, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
if rules().exists and rules().incarnation ~= ARGV[4] then
  return {'anew', 0, 0, 0}
elseif not rules().exists or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return {'lost', 0, 0, 0}
end
remove_records(server_ms())
announce(consumer, ARGV[5], false)
local now = set_clock(lease_ms)
local returned, known, more = beat(group, consumer, lease_ms, now)
local lost, further = 0, false
if rules().groups_per_version then
  --@include held_rights
  lost, further = reclaim_rights(now)
end
if returned + lost > 0 then
  wake_room(now)
  wake_returned(group, now)
end
local due = redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', string.format('%.0f', now), 'LIMIT', 0, 1)
return {known and 'held' or 'lost', returned, #due, (more or further) and 1 or 0}
