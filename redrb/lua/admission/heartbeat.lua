-- Renew the deadline of a maker that holds rights, and take back rights of makers whose deadline is over.
-- KEYS[1] stream
-- ARGV    the call `BeatMaker` of redrb/stream/admission/calls.py; the announcement of the maker's worker:
--         include/announcements.lua; '' or nil: none
-- Returns its reply
--@include task clock facts announcements permissions

check_permissions(KEYS[1])
begin_writing()
local ask, rule = cmsgpack.unpack(ARGV[1]), rules()
local maker = ask.maker
if rule.incarnation ~= ask.incarnation or not rule.groups_per_version then
  return cmsgpack.pack({outcome = 'anew'})
end
announce(ask.worker, ARGV[2], false)
--@include held_rights late_makers
local now = set_clock(ask.lease_ms)
local known = redis.call('ZSCORE', key('makers'), maker)
redis.call('ZADD', key('makers'), string.format('%.0f', now + ask.lease_ms), maker)
local lost, more = reclaim_rights(now)
if lost > 0 then
  --@include admission
  wake_rights(now)
end
return cmsgpack.pack({outcome = known and 'held' or 'lost', taken_back = lost, more = more,
  makers = late_makers(now, ask.lease_ms)})
