-- Say that a consumer lives, and take over from those that do not.
-- KEYS[1] stream
-- ARGV    group, consumer, lease_ms
-- Returns {1 when its leases were held until now else 0, entries taken over from others}
--@include task room waiters groups leases

begin_writing()
local group, consumer, now = ARGV[1], ARGV[2], now_ms()
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return {0, 0}
end
local returned, known = beat(group, consumer, tonumber(ARGV[3]), now)
if returned > 0 then
  wake('#room', room_left(), now)
  wake_pools(group, now)
end
return {known and 1 or 0, returned}
