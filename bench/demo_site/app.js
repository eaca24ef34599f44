"use strict";

const DAYS = ["Today", "Tomorrow", "The day after"];
const LUNAR_HALF_DAY_MINUTES = 745;

// First high water of today, in minutes after midnight, and mean range in metres.
const HARBOURS = {
  bristol: { firstHigh: 415, range: 11.2 },
  hull: { firstHigh: 370, range: 6.4 },
  leith: { firstHigh: 160, range: 4.6 },
  penzance: { firstHigh: 285, range: 4.9 },
};

const state = {
  user: null,
  harbour: "bristol",
};

function formatTime(minutes) {
  const inDay = minutes % (24 * 60);
  const hours = String(Math.floor(inDay / 60)).padStart(2, "0");
  const rest = String(inDay % 60).padStart(2, "0");
  return `${hours}:${rest}`;
}

function tidesFor(name) {
  const harbour = HARBOURS[name];
  if (!harbour) {
    return [];
  }
  const tides = [];
  for (let i = 0; ; i += 1) {
    const minutes = harbour.firstHigh + Math.round((i * LUNAR_HALF_DAY_MINUTES) / 2);
    const day = Math.floor(minutes / (24 * 60));
    if (day >= DAYS.length) {
      return tides;
    }
    const high = i % 2 === 0;
    const height = high ? harbour.range + 0.6 : 0.6;
    tides.push({ day: DAYS[day], time: formatTime(minutes), height, high });
  }
}

function showTides(name) {
  const rows = document.getElementById("tide-rows");
  const tides = tidesFor(name);
  rows.replaceChildren(
    ...tides.map((tide) => {
      const row = document.createElement("tr");
      row.className = tide.high ? "high" : "low";
      for (const text of [tide.day, tide.time, `${tide.height.toFixed(1)} m`, tide.high ? "High" : "Low"]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }),
  );
  showMessage(tides.length ? `${tides.length} tides found.` : "No tides for this harbour.");
}

function showMessage(text) {
  document.getElementById("tide-message").textContent = text;
}

function setUser(name) {
  state.user = name;
  const button = document.getElementById("login-button");
  button.textContent = name ? `Log out ${name}` : "Log in";
}

function setUpSearch() {
  document.getElementById("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    state.harbour = document.getElementById("harbour").value;
    showTides(state.harbour);
  });
}

function setUpLogin() {
  const dialog = document.getElementById("login-dialog");
  document.getElementById("login-button").addEventListener("click", () => {
    if (state.user) {
      setUser(null);
    } else {
      dialog.showModal();
    }
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "login") {
      setUser(document.getElementById("user-name").value.trim());
    }
    dialog.querySelector("form").reset();
  });
}

setUpSearch();
setUpLogin();
showTides(state.harbour);
