-- Which consumer groups there are, how much room the task's limits leave, and how many reads its rate.
--
-- rate is "<samples per insert> <min size> <min diff> <max diff>"; diff = inserts * samples per
-- insert - reads, of the slowest consumer group, stays between the two (Reverb's rate limiters).

local function groups()
  return redis.call('SMEMBERS', key('groups'))
end

local function stored_groups()
  return redis.call('XLEN', stream) - redis.call('ZCARD', key('archive'))
end

local function rate_of()
  local text = redis.call('HGET', task, 'rate')
  if not text or text == '' then
    return nil
  end
  local spi, size, least, most = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
  return tonumber(spi), tonumber(size), tonumber(least), tonumber(most)
end

-- How many groups the rate lets in beyond `put` ever put.
local function inserts_left(put)
  local spi, _, _, most = rate_of()
  if not spi then
    return math.huge
  end
  local taken = math.huge
  for _, group in ipairs(groups()) do
    taken = math.min(taken, number(key('group', group), 'taken'))
  end
  taken = taken < math.huge and taken or 0
  return math.max(math.floor((most + taken) / spi - put + 1e-9), 0)
end

-- How many groups the rate lets a consumer group take now.
local function reads_left(group)
  local spi, size, least = rate_of()
  if not spi then
    return math.huge
  end
  if stored_groups() < size then
    return 0
  end
  local state = key('group', group)
  local put = number(task, 'put')
  return math.max(math.floor(put * spi - number(state, 'taken') - least + 1e-9), 0)
end

local function room_left()
  local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
  if max_bytes > 0 and number(task, 'bytes') >= max_bytes then
    return 0
  end
  local left = inserts_left(number(task, 'put'))
  if limit == 0 then
    return left
  end
  return math.min(left, limit - stored_groups())
end
