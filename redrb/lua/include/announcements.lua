-- Announcements of workers, for those who look at the task: who works on it, and what each does.
--
-- workers is a sorted set: worker -> server's ms of its last announcement; announcements is a hash: worker ->
-- "<newest weight version that the task knew then> <announcement>", packed by redrb/stream/worker.py. Both
-- lose a worker ten minutes after it has ended, and twenty after it fell silent: so after whom it replaced.
--@include task

local SILENT_MS = 1200000
local ENDED_MS = 600000

-- Store an announcement, '' or nil for none, and remove some that are over.
local function announce(worker, packed, ended)
  if (packed or '') == '' then
    return
  end
  local now, workers = server_ms(), key('workers')
  redis.call('HSET', key('announcements'), worker, string.format('%d ', number(task, 'version')) .. packed)
  redis.call('ZADD', workers, string.format('%.0f', ended and now - SILENT_MS + ENDED_MS or now), worker)
  local oldest = string.format('%.0f', now - SILENT_MS)
  local over = redis.call('ZRANGEBYSCORE', workers, '-inf', oldest, 'LIMIT', 0, PAGE.announcements_removed)
  if #over > 0 then
    redis.call('ZREM', workers, unpack(over))
    redis.call('HDEL', key('announcements'), unpack(over))
  end
end

-- How many workers are not over; those that are over stay until the next announcement of any worker.
local function announced_count()
  return redis.call('ZCOUNT', key('workers'), string.format('(%.0f', server_ms() - SILENT_MS), '+inf')
end

-- The server's ms of the announcement of each worker that has announced itself, or its end, since a time: the
-- newest first, `most` at most of those that live and of those that have ended. And name and announcement of
-- each, in one list.
local function announced_since(since, most)
  local workers, names, seen, found = key('workers'), {}, {}, {}
  local function look(from, to)
    local newest = redis.call('ZREVRANGEBYSCORE', workers, to, from, 'WITHSCORES', 'LIMIT', 0, most)
    for i = 1, #newest, 2 do
      names[#names + 1], seen[#seen + 1] = newest[i], newest[i + 1]
    end
  end
  look(since, '+inf')
  if since ~= '-inf' then -- else these are among the others
    local shift = SILENT_MS - ENDED_MS
    look(string.format('%.0f', since - shift), string.format('%.0f', server_ms() - shift))
  end
  for i, packed in ipairs(#names > 0 and redis.call('HMGET', key('announcements'), unpack(names)) or {}) do
    found[#found + 1], found[#found + 2] = names[i], packed or ''
  end
  return seen, found
end
