-- Renew the deadline of a maker that holds rights, and take back rights of makers whose deadline is over.
-- KEYS[1] stream
-- ARGV    maker, lease_ms, incarnation, worker, announcement
--         lease_ms: the maker is dead after so long without a heartbeat
--         announcement: of the maker's worker: include/announcements.lua; '': none
-- Returns {'held' | 'lost', rights, more}: whether the maker was registered until now, so that it has its
--         rights yet; how many rights were taken back from others; 1 if there may be more: beat again at once
--       | {'anew', 0, 0}: the task was created anew, or admits no more
--@include task clock facts announcements permissions

check_permissions(KEYS[1])
begin_writing()
local rule, maker, lease_ms = rules(), ARGV[1], tonumber(ARGV[2])
if rule.incarnation ~= ARGV[3] or not rule.groups_per_version then
  return {'anew', 0, 0}
end
announce(ARGV[4], ARGV[5], false)
--@include held_rights
local now = set_clock(lease_ms)
local known = redis.call('ZSCORE', key('makers'), maker)
redis.call('ZADD', key('makers'), string.format('%.0f', now + lease_ms), maker)
local lost, more = reclaim_rights(now)
if lost > 0 then
  --@include admission
  wake_rights(now)
end
return {known and 'held' or 'lost', lost, more and 1 or 0}
