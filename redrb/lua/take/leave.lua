-- A consumer ends: its leased groups are requeued, a page at a time.
-- KEYS[1] stream
-- ARGV    group, consumer
-- Returns {'more' | 'done', entries requeued}: with 'more', run it again
--@include task waking takeover permissions

local group, consumer = ARGV[1], ARGV[2]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return {'done', 0}
end
check_permissions(stream)
begin_writing()
local returned, ended = return_leases(group, consumer, false, PAGE.taken_over)
if returned > 0 then
  wake_room()
  wake_returned(group)
end
return {ended and 'done' or 'more', returned}
