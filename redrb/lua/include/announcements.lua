-- Announcements of workers, for those who look at the task: who works on it, and what each does.
--
-- workers is a sorted set: worker -> server's ms of its last announcement; announcements is a hash: worker ->
-- "<newest weight version that the task knew then> <announcement>", packed by redrb/stream/worker.py. Both
-- lose a worker a minute after it has ended, and ten minutes after it fell silent.
--@include task

local SILENT_MS = 600000
local ENDED_MS = 60000
local MOST_REMOVED = 100 -- by one call

-- Store an announcement, '' or nil for none, and remove some that are over.
local function announce(worker, packed, ended)
  if (packed or '') == '' then
    return
  end
  local now, workers = server_ms(), key('workers')
  redis.call('HSET', key('announcements'), worker, string.format('%d ', number(task, 'version')) .. packed)
  redis.call('ZADD', workers, string.format('%.0f', ended and now - SILENT_MS + ENDED_MS or now), worker)
  local oldest = string.format('%.0f', now - SILENT_MS)
  local over = redis.call('ZRANGEBYSCORE', workers, '-inf', oldest, 'LIMIT', 0, MOST_REMOVED)
  if #over > 0 then
    redis.call('ZREM', workers, unpack(over))
    redis.call('HDEL', key('announcements'), unpack(over))
  end
end
