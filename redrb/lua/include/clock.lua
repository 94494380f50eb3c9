-- The clock of a task: all deadlines of its consumers and waiters are times of this clock.
--
-- It advances as the server's clock does, but leaves out the time by which that was set forward or back.
-- The field `clock` of the task is "<server ms> <task ms> <most ms>": the server's time and the task's time
-- when the clock was last set; and the longest time until a living consumer sets it again, half a lease.
-- If more time than that has passed, either the server's clock was set forward, or Redis was away: no
-- consumer could renew its lease meanwhile. Then only a third of `most` counts. If the server's
-- clock was set back, no time has passed. docs/contributing/decisions/clock.md
--@include task

local NO_LEASE_MS = 15000 -- `most` until the first consumer comes
local WAITER_MS = 2000 -- longest time until a living waiter looks again

-- The server's time, the task's time when the clock was last set, the server's time that has passed since
-- then, and `most`, nil if the clock was never set. `stored` is the field, if the caller has read it.
local function read_clock(stored)
  local server = server_ms()
  stored = stored or redis.call('HGET', task, 'clock') or ''
  local set, time, most = string.match(stored, '^(%d+) (%d+) (%d+)$')
  if not set then
    return server, server, 0, nil
  end
  return server, tonumber(time), server - set, tonumber(most)
end

-- How much of the server's time that has passed counts.
local function elapsed(passed, most)
  if passed > math.max(most, WAITER_MS) then
    return math.floor(most / 3)
  end
  return math.max(passed, 0)
end

-- The task's time.
local function now_ms()
  local _, time, passed, most = read_clock()
  return time + elapsed(passed, most or NO_LEASE_MS)
end

-- The task's time if all of the server's time has passed in it: for reports only. Where no process sets the
-- clock any more, `now_ms` stands still, and the dead seem to live.
local function reported_ms()
  local _, time, passed = read_clock()
  return time + math.max(passed, 0)
end

-- Set the clock: heartbeats and takes do so, with the lease of their consumer, and waiting puts. Returns the
-- task's time. Nothing is written if the clock was set less than a tenth of `most` ago.
local function set_clock(lease_ms, stored)
  local server, time, passed, most = read_clock(stored)
  local own = lease_ms and math.floor(lease_ms / 2) or most or NO_LEASE_MS
  local now = time + elapsed(passed, math.min(most or own, own))
  if most ~= own or passed < 0 or passed * 10 > own then
    redis.call('HSET', task, 'clock', string.format('%.0f %.0f %.0f', server, now, own))
  end
  return now
end
