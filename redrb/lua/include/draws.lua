-- The groups that match a query: the first ones in the pool's order, in a sampled order drawn ones.
--@include facts pools plan where drawn

local function weights_of(members)
  local weights, alike = {}, rules().order == 'uniform'
  for i, facts in ipairs(alike and members or facts_of_all(members)) do
    weights[i] = alike and 1 or facts and facts.score or 0
  end
  return weights
end

-- Whether n groups that match are among the first places, with a margin of two, as a random sample of the
-- pool tells. No place tells it: else the places that are left would tell of it.
local function is_common(query, n)
  if query.size <= PAGE.matched then
    return true
  end
  local some, all, matched = redis.call('ZRANDMEMBER', query.whole.zset, PAGE.sample), 0, 0
  for _, weight in ipairs(weights_of(some)) do
    all = all + weight
  end
  for _, weight in ipairs(weights_of(matching(query, some, true))) do
    matched = matched + weight
  end
  return matched > 0 and 2 * n * all <= PAGE.matched * matched
end

-- The first n members that match among the `most` first places, and the others that lie before the last of
-- them.
local function drawn_by_place(query, most, n)
  local chosen, passed, looked, step = {}, {}, 0, n
  while looked < most do -- bound: PAGE.matched
    local last = math.min(looked + step, most) - 1
    local page = redis.call('ZRANGE', query.whole.zset, looked, last)
    local matches, at = matching(query, page, true), 1
    for _, member in ipairs(page) do
      if member ~= matches[at] then
        passed[#passed + 1] = member
      else
        chosen[#chosen + 1], at = member, at + 1
        if #chosen == n then
          return chosen, passed
        end
      end
    end
    looked, step = last + 1, step * 2
  end
  return chosen, passed
end

-- Draw n members among all that match, whatever their places are.
local function drawn_anew(query, sources, n)
  local found, chosen = {}, {}
  search(query, true, sources, function(members)
    for i, weight in ipairs(weights_of(members)) do
      local at = weight > 0 and exponential() / weight or math.huge
      found[#found + 1] = {at, exponential(), members[i]} -- equal places have a random order
    end
    if #found > n + 4 * PAGE.matched then
      keep_first(found, n)
    end
  end)
  keep_first(found, n)
  for i, each in ipairs(found) do
    chosen[i] = each[3]
  end
  return chosen
end

-- The first n >= 1 members that match: in a sampled order drawn ones, in the order in which they were drawn.
-- Also returns the groups that the draw has passed over. They need new places: with their old ones, which are
-- the lowest, they would be drawn next.
local function first_where(group, pool, names, expr, n)
  if not rules().sampled then
    return select_where(pool, names, expr, n), {}
  end
  local query = prepare(pool, names, expr)
  local _, sources = plan(query, query.root, true)
  local weighed = redis.call('ZCOUNT', query.whole.zset, '-inf', '(+inf') -- the others share one place
  if weighed > 0 and is_common(query, n) then
    local most = math.min(weighed, PAGE.matched)
    local chosen, passed = drawn_by_place(query, most, n)
    if #chosen == n or most == query.size then
      return chosen, passed
    end
    for _, member in ipairs(chosen) do
      passed[#passed + 1] = member
    end
    pass_over(group, pool, passed)
  end
  return drawn_anew(query, sources, n), {}
end
