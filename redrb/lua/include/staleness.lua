-- Expires groups that are too stale, and counts the staleness of taken groups.
--@include task facts pools groups

local MOST_STALENESS = 1023 -- a larger staleness counts as this one, as in redrb/stream/task/expiration.py

-- At most `limit` members of a pool whose oldest version is at most `cut`, or the version of whose newest
-- token is at most `token_cut`. With one rule alone they are the lowest members of a sorted set, whose
-- name is returned, too.
local function overdue(pool, cut, token_cut, limit)
  if (cut == nil) ~= (token_cut == nil) then
    local name, most = cut and versions_of(pool) or key('newest', pool), cut or token_cut
    return redis.call('ZRANGEBYSCORE', name, '-inf', most, 'LIMIT', 0, limit), name
  end
  local found, seen = {}, {}
  local function look(name, most)
    if most and #found < limit then
      for _, member in ipairs(redis.call('ZRANGEBYSCORE', name, '-inf', most, 'LIMIT', 0, limit)) do
        if not seen[member] and #found < limit then
          seen[member] = true
          found[#found + 1] = member
        end
      end
    end
  end
  look(versions_of(pool), cut)
  look(key('newest', pool), token_cut)
  return found
end

-- Expire at most `limit` groups of a status. With a note, which says by which rule, they move to the
-- status expired; else they are discarded. Returns their number.
local function expire_pool(group, status, cut, token_cut, limit, note)
  local pool, expired = pool_of(group, status), pool_of(group, 'expired')
  if note and pool == expired then
    return 0
  end
  local found, lowest_of = overdue(pool, cut, token_cut, limit)
  local state = key('group', group)
  if #found == 0 then
    return 0
  end
  withdraw(group, pool, found, nil, lowest_of)
  if note then
    local moved, notes = {}, {}
    for i, member in ipairs(found) do
      moved[2 * i - 1], moved[2 * i] = member, 'expired'
      notes[2 * i - 1], notes[2 * i] = member, note
    end
    in_parts('HSET', key('moved', group), moved)
    in_parts('HSET', key('expiries', group), notes)
    enter(group, expired, found, facts_of_all(found))
    return #found
  end
  local seqs = {}
  for i, member in ipairs(found) do
    seqs[i] = string.match(member, '[1-9]%d*')
  end
  add(state, 'expired', #found)
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    in_parts('HDEL', key('deliveries', group), found)
  end
  forget(group, seqs)
  return #found
end

-- Expire at most PAGE.expired groups of a status that are too stale by the task's rules. Returns their
-- number, and whether there may be more.
local function expire_overdue(group, status)
  local rule = rules()
  if not rule.version or status == 'expired' then
    return 0, false
  end
  local cut = rule.max_staleness and rule.version - rule.max_staleness - 1
  local token_cut = rule.max_token_staleness and rule.version - rule.max_token_staleness - 1
  if not cut and not token_cut then
    return 0, false
  end
  local note = rule.keep and expiry_note(rule.version, rule.max_staleness, rule.max_token_staleness)
  local expired = expire_pool(group, status, cut, token_cut, PAGE.expired, note)
  return expired, expired == PAGE.expired
end

-- Count the staleness of groups that are being taken: o by the oldest token, n by the newest. Of o the
-- shares that arose in flight (f: versions published before the group was put) and in the queue (q:
-- versions published since).
local function note_staleness(group, all)
  local now, counts = rules().version, {o = {}, n = {}, f = {}, q = {}}
  local function count(mark, stale)
    stale = math.max(0, math.min(stale, MOST_STALENESS))
    counts[mark][stale] = (counts[mark][stale] or 0) + 1
  end
  for _, facts in ipairs(all) do
    if facts and facts.newest then
      count('n', now - facts.newest)
    end
    if facts and facts.version then
      local stale = math.max(0, now - facts.version)
      count('o', stale)
      if facts.current then
        local flight = math.min(stale, math.max(0, facts.current - facts.version))
        count('f', flight)
        count('q', stale - flight)
      end
    end
  end
  for mark, found in pairs(counts) do
    for stale, times in pairs(found) do
      redis.call('HINCRBY', key('staleness', group), string.format('%s%.0f', mark, stale), times)
    end
  end
end

-- Count the staleness of groups that are being taken, and add the weights by which they were drawn. Returns
-- their facts, where these were read.
local function note_taken(group, pool, found, weights)
  local rule = rules()
  if #found == 0 or not (rule.version or rule.sampled) then
    return nil
  end
  local all = facts_of_all(found)
  if rule.version then
    note_staleness(group, all)
  end
  if rule.sampled then
    --@include drawn
    note_drawn(group, pool, found, all, weights)
  end
  return all
end

-- The reply to a take that an earlier attempt has done. Drawn groups are in the order of their weights,
-- not in the order in which they were drawn.
local function taken_before(pool, pending)
  local entries, members, weights, total = {}, {}, {}, 0
  for i, entry in ipairs(pending) do
    local member = member_of(seq_of(entry[1]))
    local facts = facts_of(member)
    entries[i] = {facts and score_of(facts, member) or 0, member}
  end
  table.sort(entries, function(one, other)
    return one[1] < other[1] or one[1] == other[1] and one[2] < other[2]
  end)
  for i, entry in ipairs(entries) do
    members[i] = entry[2]
    if rules().sampled then
      weights[i] = string.format('%.17g', entry[1])
      total = total + entry[1]
    end
  end
  if rules().sampled then
    --@include places
    total = string.format('%.17g', total + mass_of(pool))
  end
  return {outcome = 'taken', amount = #pending, members = members, weights = weights, total_weight = total}
end
