-- Held rights of makers: found, used, returned, and taken back. include/admission.lua says what is stored.
--@include task facts

-- End held rights, by number: they were used, returned or lost. Returns how many of them were held.
local function end_rights(ended, outcome)
  local total = 0
  for first = 1, #ended, PAGE.arguments do
    local page, gone, members = {unpack(ended, first, math.min(first + PAGE.arguments - 1, #ended))}, {}, {}
    for i, record in ipairs(redis.call('HMGET', key('right'), unpack(page))) do
      if record then
        gone[#gone + 1] = page[i]
        members[#members + 1] = string.match(record, '%S+$') .. '/' .. page[i]
      end
    end
    if #gone > 0 then
      redis.call('ZREM', key('rights'), unpack(gone))
      redis.call('ZREM', key('holds'), unpack(gone))
      redis.call('ZREM', key('holders'), unpack(members))
      redis.call('HDEL', key('right'), unpack(gone))
    end
    total = total + #gone
  end
  add(key('admission'), outcome, total)
  return total
end

-- The numbers of at most `most` held rights of a maker, or of a waiter.
local function rights_of(holder, most)
  local found = redis.call('ZRANGEBYLEX', key('holders'), '[' .. holder .. '/', '(' .. holder .. '0',
    'LIMIT', 0, most) -- '0' is the character after '/'
  for i, member in ipairs(found) do
    found[i] = string.match(member, '%d+$')
  end
  return found
end

-- Take back rights of dead makers, and rights that are held for too long: a page. Returns their number, and
-- whether there may be more.
local function reclaim_rights(now)
  local lost, over = 0, string.format('%.0f', now)
  local dead = redis.call('ZRANGEBYSCORE', key('makers'), '-inf', over, 'LIMIT', 0, PAGE.dead_makers)
  for _, maker in ipairs(dead) do
    local found = lost < PAGE.rights_lost and rights_of(maker, PAGE.rights_lost - lost) or {}
    lost = lost + end_rights(found, 'lost')
    if lost < PAGE.rights_lost then
      redis.call('ZREM', key('makers'), maker)
    end
  end
  if lost < PAGE.rights_lost then
    local held_long = redis.call('ZRANGEBYSCORE', key('holds'), '-inf', over, 'LIMIT', 0,
      PAGE.rights_lost - lost)
    lost = lost + end_rights(held_long, 'lost')
  end
  return lost, lost == PAGE.rights_lost or #dead == PAGE.dead_makers
end

-- A put has used some rights of a `series`, by number, and returns others. Rights that have ended before, or
-- were given by a task that was deleted, are counted as late.
local function use_rights(given)
  local used = 0
  if redis.call('HGET', key('admission'), 'series') == given.series then
    used = end_rights(given.used, 'used')
    end_rights(given.returned, 'returned')
  end
  add(key('admission'), 'late', #given.used - used)
  if rules().groups_per_version and redis.call('EXISTS', key('queue', '#admission')) == 1 then
    --@include admission
    wake_rights()
  end
end

-- Keep a right for a group that several processes make: it is that of a `holder`, and of no maker any more,
-- until it is used or returned, or until the time `ends`, if there is one.
local function keep_right(series, right, holder, ends)
  local record = redis.call('HGET', key('right'), right)
  if record and redis.call('HGET', key('admission'), 'series') == series then
    redis.call('ZREM', key('holders'), string.match(record, '%S+$') .. '/' .. right)
    redis.call('ZREM', key('holds'), right)
    redis.call('HSET', key('right'), right, (string.gsub(record, '%S+$', holder)))
    redis.call('ZADD', key('holders'), 0, holder .. '/' .. right)
    if ends then
      redis.call('ZADD', key('holds'), ends, right)
    end
  end
end

-- A group that was put in parts does not need its right.
local function return_right(series, right)
  if redis.call('HGET', key('admission'), 'series') == series then
    end_rights({right}, 'returned')
  end
end
