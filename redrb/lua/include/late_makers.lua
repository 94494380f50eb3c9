-- Makers that may have died, with rights or while they waited for them.
--@include task late_heartbeats

local LOOK_MS = 7000 -- a maker that waits looks at least every five seconds: `SLICE_S` of admitter.py
local QUEUE_TTL_MS = 30000 -- as there

-- Names of makers that are late for a heartbeat, or for a look at their place in the queue: a page of each.
local function late_makers(now, lease_ms)
  local found = late_for('makers', now, lease_ms)
  local first = redis.call('ZRANGE', key('queue', '#admission'), 0, PAGE.late - 1)
  local needs = #first > 0 and redis.call('HMGET', key('needs', '#admission'), unpack(first)) or {}
  for i, need in ipairs(needs) do
    local deadline = tonumber(string.match(need or '', '^%d+ (%d+)') or '0')
    if deadline - now < QUEUE_TTL_MS - LOOK_MS then
      found[#found + 1] = string.match(first[i], '^[^/]+')
    end
  end
  return found
end
