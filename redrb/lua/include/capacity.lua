-- Says how many groups the limits of a task let in, and how many reads its rate allows.
--
-- rate is "<samples per insert> <min size> <min diff> <max diff>"; diff = inserts * samples per
-- insert - reads, of the slowest consumer group, stays between the last two (Reverb's rate limiters).
-- In group:<g>, `taken` are its reads; `unread` are reads that can no longer happen, as groups ended
-- before they were read max_reads times; `lead` are reads that puts do not wait for, as the group was
-- so far behind the others when it joined.
--@include task

-- The four numbers of the rate, and how much one unread read counts.
local function rate_of()
  local stored = redis.call('HMGET', task, 'rate', 'max_reads', 'default_max_reads')
  if not stored[1] or stored[1] == '' then
    return nil
  end
  local spi, size, least, most = string.match(stored[1], '^(%S+) (%S+) (%S+) (%S+)$')
  local max_reads = tonumber(stored[2] or stored[3])
  local share = max_reads > 0 and spi / max_reads or 0
  return tonumber(spi), tonumber(size), tonumber(least), tonumber(most), share
end

-- Reads of a consumer group as the rate counts them, and its lead.
local function reads_of(group, share)
  local counted = numbers(key('group', group), 'taken', 'unread', 'lead')
  return counted[1] + counted[2] * share, counted[3]
end

-- How many more groups the rate lets in after `put` groups.
local function inserts_left(put)
  local spi, _, _, most, share = rate_of()
  if not spi then
    return math.huge
  end
  local slowest = math.huge
  for _, group in ipairs(groups()) do
    local reads, lead = reads_of(group, share)
    slowest = math.min(slowest, reads + lead)
  end
  slowest = slowest < math.huge and slowest or 0
  return math.max(math.floor((most + slowest) / spi - put + 1e-6), 0)
end

-- How many reads the rate allows a consumer group now.
local function reads_left(group)
  local spi, size, least, _, share = rate_of()
  if not spi then
    return math.huge
  end
  if redis.call('XLEN', stream) < size then
    return 0
  end
  local reads = reads_of(group, share)
  return math.max(math.floor(number(puts, 'put') * spi - reads - least + 1e-6), 0)
end

-- Of `here` groups, how many the rate lets a consumer group take now; and how many it ever lets be taken
-- together, `most` at most (0: no bound): more reads would wait for puts that it blocks.
local function bound_by_rate(group, here, most)
  local _, _, low, high = rate_of()
  local left = reads_left(group)
  local together = math.max(left, math.floor(high - low))
  return math.min(here, left), most > 0 and math.min(most, together) or together
end

-- How many groups the limits and the rate let in now.
local function room_left()
  local known = numbers(task, 'limit', 'max_bytes', 'bytes')
  if known[2] > 0 and known[3] >= known[2] then
    return 0
  end
  local left = inserts_left(number(puts, 'put'))
  if known[1] == 0 then
    return left
  end
  return math.min(left, known[1] - redis.call('XLEN', stream))
end
