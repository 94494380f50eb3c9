-- Who is late for a heartbeat: consumers:<group> and makers are sorted sets with their deadlines.
--@include task

local LATE_MS = 3750 -- of a heartbeat that comes every 2.5 s

-- A page of those in a sorted set that are late for a heartbeat: a process of the same machine may know that
-- they have ended. `lease_ms` is that of the caller.
local function late_for(name, now, lease_ms)
  local due = now + lease_ms - math.min(lease_ms / 2, LATE_MS)
  return redis.call('ZRANGEBYSCORE', key(name), '-inf', string.format('%.0f', due), 'LIMIT', 0, PAGE.late)
end
