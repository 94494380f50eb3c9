-- Removes the records of producers that have put nothing for two epochs: include/epochs.lua says why it may.
--@include task

local EPOCH_MS = 3600000

-- Remove those records of a page that are two epochs old.
local function remove_page(at, epoch)
  local page, over = redis.call('HSCAN', puts, at, 'COUNT', PAGE.records), {}
  for i = 1, #page[2], 2 do
    local stored = string.match(page[2][i + 1], '^%d+ %d+ %d+ ?(%d*)$') -- others are no records
    if stored and (tonumber(stored) or 0) <= epoch - 2 then
      over[#over + 1] = page[2][i]
    end
  end
  in_parts('HDEL', puts, over)
  return page[1]
end

-- Begin an epoch when its time has come, and remove a page of old records after that. The fields of the
-- task are `epoch_ms`, when the epoch began, and `epoch_at`, the place of the next page.
local function remove_records(now)
  local began, at = unpack(redis.call('HMGET', task, 'epoch_ms', 'epoch_at'))
  if not at then
    began = tonumber(began or '')
    if not began or began > now then -- a clock may be set back
      redis.call('HSET', task, 'epoch_ms', string.format('%.0f', now))
      return
    elseif now - began < EPOCH_MS then
      return
    end
    redis.call('HINCRBY', puts, 'epoch', 1)
    redis.call('HSET', task, 'epoch_ms', string.format('%.0f', now))
  end
  local place = remove_page(at or '0', number(puts, 'epoch'))
  if place == '0' then
    redis.call('HDEL', task, 'epoch_at')
  else
    redis.call('HSET', task, 'epoch_at', place)
  end
end
