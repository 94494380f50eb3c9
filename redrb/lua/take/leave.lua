-- A consumer ends: what it still leases goes back, unharmed.
-- KEYS[1] stream
-- ARGV    group, consumer
-- Returns the number of entries that went back.
--@include task groups leases

begin_writing()
local group = ARGV[1]
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return 0
end
local returned = return_leases(group, ARGV[2], false)
wake_pools(group, now_ms())
return returned
