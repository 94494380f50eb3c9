-- Counts waiting groups by staleness, and reads facts of groups, with work that does not depend on their
-- number.
--@include task facts pools

local MOST_EXACT = 32 -- a larger staleness counts as the next one

-- The facts of groups as they are stored, false where there are none.
local function packed_facts(members)
  return #members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}
end

-- Count the groups of a pool that is sorted by version: one look for each staleness, up to that of the oldest
-- group. Returns {'exact', groups without a version, oldest version or '', staleness, groups, ...}.
local function count_by_version(pool, total)
  local name, version = versions_of(pool), rules().version
  local oldest = redis.call('ZRANGEBYSCORE', name, '-inf', '(inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if not oldest then
    return {'exact', total, ''}
  end
  local left, largest, stale = redis.call('ZCOUNT', name, '-inf', '(inf'), version - tonumber(oldest), 0
  local found = {'exact', total - left, oldest}
  while left > 0 do -- bound: MOST_EXACT + 2 looks
    local number_of = left
    if stale < largest and stale <= MOST_EXACT then
      local from = string.format('%.0f', version - stale)
      number_of = redis.call('ZCOUNT', name, from, stale == 0 and '(inf' or from)
    end
    if number_of > 0 then
      found[#found + 1], found[#found + 2] = stale, number_of
    end
    left, stale = left - number_of, stale + 1
  end
  return found
end

-- The completed groups that wait for a consumer group: as count_by_version, or {'facts', groups, packed facts
-- ...} of `most` groups, the first and last of the queue.
local function count_waiting(group, most)
  local pool = pool_of(group, 'completed')
  local ready = key('ready', pool)
  local total = redis.call('ZCARD', ready)
  if total == 0 or not rules().version then
    return {'exact', total, ''}
  elseif sorts_by_version() or indexes_versions() then
    return count_by_version(pool, total)
  end
  local half = math.ceil(most / 2)
  local members = redis.call('ZRANGE', ready, 0, total <= most and -1 or half - 1)
  if total > most then
    -- bound: `most`, PAGE.observed_groups
    for _, member in ipairs(redis.call('ZRANGE', ready, half - most, -1)) do
      members[#members + 1] = member
    end
  end
  return {'facts', total, unpack(packed_facts(members))}
end

-- Of the groups that a consumer group leases {'facts', groups, packed facts ...}, of `most` of them.
local function read_leased(group, leased, most)
  local members = {}
  local pending = leased > 0 and rules().version
    and redis.call('XPENDING', stream, group, '-', '+', most) or {}
  for i, entry in ipairs(pending) do
    members[i] = member_of(seq_of(entry[1]))
  end
  return {'facts', leased, unpack(packed_facts(members))}
end
