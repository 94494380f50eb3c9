-- Which consumer groups there are, and how much room is left under the task's limits.

local function groups()
  return redis.call('SMEMBERS', key('groups'))
end

local function room_left()
  local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
  if max_bytes > 0 and number(task, 'bytes') >= max_bytes then
    return 0
  end
  if limit == 0 then
    return math.huge
  end
  return limit - redis.call('XLEN', stream)
end
