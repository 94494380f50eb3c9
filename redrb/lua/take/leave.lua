-- A consumer ends: its leased groups are requeued.
-- KEYS[1] stream
-- ARGV    group, consumer
-- Returns the number of entries requeued.
--@include task groups leases

begin_writing()
local group = ARGV[1]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return 0
end
local returned = return_leases(group, ARGV[2], false)
wake_pools(group, now_ms())
return returned
